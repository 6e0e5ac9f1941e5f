"""`compiled-ddp explain`: what is reduced in which bucket of your own model, by whom, why, and when."""
