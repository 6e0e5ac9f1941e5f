"""What a wrapper does from step to step, in one room. The way of a gradient:

    forwards        which forward waits for its backward, and which step it belongs to
    hooks, graphs   autograd has accumulated a gradient; a captured graph asks whether it may launch its buckets
    runtime         the wrapper's side of a backward: `beginning` makes it, `ending` ends it
    synchronised    one backward: in which order buckets are launched, whoever produces the gradients
    steady          one by hooks like the one before it, in few calls, until anything asks for more
    gradients       between .grad and the buckets: what goes in, and what comes back
    buffers, riders what a bucket lies in, and what travels with it
    launches        starting the reduction of each bucket, and waiting for it

Beside it `agreed_sequence` (the order that all ranks keep), `reduction` (what all backwards of a wrapper share),
`under_way` (phases), `conductor` (several wrappers), `join` (uneven inputs) and `sparse_gradients`.
"""
