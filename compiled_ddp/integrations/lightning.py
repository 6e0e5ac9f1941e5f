"""Strategies for the Trainer and the Fabric of `lightning` that train with `compile_ddp`.

Importing it registers both as "compiled_ddp". It is imported by who asks for it alone: `pip install
"compiled-ddp[trainers]"` brings lightning. For the package pytorch_lightning there is
`compiled_ddp.integrations.pytorch_lightning`.
"""

import lightning.fabric.strategies
import lightning.pytorch.strategies

from compiled_ddp.integrations.lightning_strategies import SetsUpOurs, TrainsWithOurs


class CompiledDDPStrategy(TrainsWithOurs, lightning.pytorch.strategies.DDPStrategy):
    """`lightning.pytorch.strategies.DDPStrategy` with the wrapper of `compile_ddp` in the place of torch's."""


class FabricCompiledDDPStrategy(SetsUpOurs, lightning.fabric.strategies.DDPStrategy):
    """`lightning.fabric.strategies.DDPStrategy` with the wrapper of `compile_ddp` in the place of torch's."""


lightning.pytorch.strategies.StrategyRegistry.register("compiled_ddp", CompiledDDPStrategy, override=True)
lightning.fabric.strategies.STRATEGY_REGISTRY.register("compiled_ddp", FabricCompiledDDPStrategy, override=True)
