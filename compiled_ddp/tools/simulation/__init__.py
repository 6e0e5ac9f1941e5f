"""What a step takes on more ranks than there are: `compiled-ddp simulate`.

From the inside out:

algorithms.py  an all-reduce of any number of ranks, made of hops from one rank to the next
jobs.py        what one rank computes in a step, and when its gradients are ready: given, or by a file
measured.py    the same, of the user's function, measured on this machine
simulate.py    the step on each number of ranks: planned anew, predicted, and beside it DDP's buckets and the limit
table.py, chart.py
               the table and the picture
arguments.py, command.py
               the command line
"""
