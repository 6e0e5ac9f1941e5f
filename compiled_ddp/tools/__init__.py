"""What stands beside the core: commands, and the functions that measure and prove. The core imports nothing of it.

calibration    `calibrate()`, and its command
simulation     the steps of more ranks, or of another link, from one machine
explanation    what the buckets of a script's model will be, and when
precompile     what a job's ranks would compile, ahead of it
comparison     wrappers held against each other on a model: steps, limits, first steps
parity         `verify_parity()`: gradients held against plain autograd's
command_line   what the commands share
"""
