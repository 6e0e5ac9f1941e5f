"""The wrapped model: which parameters and buffers are managed, whether they can be, and whether they have changed."""
