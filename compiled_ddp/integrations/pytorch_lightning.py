"""A strategy for the Trainer of the package pytorch_lightning: `compiled_ddp.integrations.lightning` has the others.

Importing it registers the strategy as "compiled_ddp".
"""

import pytorch_lightning.strategies

from compiled_ddp.integrations.lightning_strategies import TrainsWithOurs


class CompiledDDPStrategy(TrainsWithOurs, pytorch_lightning.strategies.DDPStrategy):
    """`pytorch_lightning.strategies.DDPStrategy` with the wrapper of `compile_ddp` in the place of torch's."""


pytorch_lightning.strategies.StrategyRegistry.register("compiled_ddp", CompiledDDPStrategy, override=True)
