"""Graph passes: an AOTAutograd backward graph in, the same graph with its gradients reduced over ranks out.

Passes know `torch.fx` and the plan's plain data types, nothing else of the library; `pipeline` says in which order
they run.
"""
