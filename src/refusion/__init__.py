"""ReFusion: slot-parallel diffusion language models. Train, decode, measure.

    import refusion
    model = refusion.load("nano")
    result = model.generate("Write as JSON: Mia, 34, is a pilot from Lima and likes chess.")
    print(result.text, result.stats.tokens_per_forward)

torch is imported when a model is loaded, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from refusion.config import AutoregressiveConfig, DecodeConfig, DreamConfig, LladaConfig, UserError

if TYPE_CHECKING:
    from refusion.generate import Model, Result, Stats, load

__version__ = "0.1.0"
__all__ = [
    "AutoregressiveConfig", "DecodeConfig", "DreamConfig", "LladaConfig", "Model", "Result", "Stats", "UserError",
    "__version__", "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("Model", "Result", "Stats", "load"):
        from refusion import generate

        return getattr(generate, name)
    raise AttributeError(f"module 'refusion' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
