"""What a wrapper does from step to step, in one room. The way of a gradient:

    hooks, graphs   autograd has accumulated a gradient; a captured graph asks whether it may launch its buckets
    runtime         the wrapper's side of a backward, and its phases: `beginning` makes it, `ending` ends it
    steady          one like the one before it, in few calls, until anything asks for more
    synchronised    any other: in which order buckets are launched, whoever produces the gradients
    gradients       between .grad and the buckets: what goes in, and what comes back
    buffers         what a bucket lies in
    channel         what travels with it: which step a forward belongs to, and what ranks tell each other in riders
    launches        starting the reduction of each bucket, and waiting for it

Beside it `agreed_sequence` (the order that all ranks keep), `reduction` (what all backwards of a wrapper share),
`graph_call` (what is known of a call of a graph), `conductor` (several wrappers), `join` (uneven inputs) and
`sparse_gradients`.
"""
