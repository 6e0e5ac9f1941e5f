"""The wrappers as other libraries expect them."""
