"""No second copy of a bucket: its all-reduce works in the memory that the gradients were packed into."""

from torch.fx import Graph

from compiled_ddp.passes.ops import PACKS, all_reduce, all_reduce_in_place, is_launch


def reduce_in_place(graph: Graph, *, group_name: str) -> None:
    """Let the all-reduce of each packed bucket overwrite it, for a backend that does not find that out by itself.

    Assumes buckets as `pack_buckets` leaves them, whose flat buffers nothing else reads:

        pack -> all_reduce -> wait        becomes        pack -> all_reduce_ -> wait

    Does nothing to a launch of what is not packed: the collectives of a communication hook, the naive program.
    """
    for launch in [node for node in graph.nodes if node.target is all_reduce and is_launch(node, group_name)]:
        (flat,) = launch.all_input_nodes
        if flat.target in PACKS and list(flat.users) == [launch]:
            launch.target = all_reduce_in_place
