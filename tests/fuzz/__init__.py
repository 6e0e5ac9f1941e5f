"""Random programs, trained by both wrappers and compared with autograd averaged by hand."""
