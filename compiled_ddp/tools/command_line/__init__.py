"""What the commands share: the function that SCRIPT:FUNCTION names, its seeds and batches, and ranks on this machine.

`__main__.py` has the commands. Until they run, nothing here imports torch.
"""
