"""`verify_parity` and its command line: gradients beside plain autograd averaged by hand."""
