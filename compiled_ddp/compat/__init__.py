"""Scripts written for apex, or for the BERT pre-training fork of it, with the import changed (docs/apex.md).

from compiled_ddp.compat.apex import DistributedDataParallel, Reducer
from compiled_ddp.compat.bert import DistributedDataParallel
"""

from compiled_ddp.compat import apex, bert

__all__ = ["apex", "bert"]
