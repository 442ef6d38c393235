"""What `update` gives to attention over codes in place of tensors.

transformers passes it through a model's attention untouched, to the attention function that the model is set to. Where a model, or another
attention, uses it as a tensor all the same, it raises and names the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from hf_kvq.kernels import Visibility

__all__ = ["ATTENTION", "CodedStates", "View"]

ATTENTION = "hf_kvq"
"""Name of the attention over codes, for `model.set_attn_implementation`."""


@runtime_checkable
class View(Protocol):
    """What one forward reads of a layer: columns `first` to `end`, of which a query sees `window` at most (None for all)."""

    @property
    def first(self) -> int:
        """The oldest column."""
        ...

    @property
    def end(self) -> int:
        """The column after the newest."""
        ...

    @property
    def window(self) -> int | None:
        """Columns that a query sees, itself included; None for all."""
        ...

    @property
    def layer(self) -> int:
        """Index of the layer, for errors."""
        ...

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values as tensors."""
        ...

    def attend(
        self,
        query: Float[Tensor, "batch heads queries key_dim"],
        visibility: Visibility,
        *,
        scaling: float,
        softcap: float | None = None,
        sink_logits: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Attention of the queries over all columns."""
        ...


class CodedStates:
    """Keys, or values, of one layer as they are stored.

    Attributes:
        view: Both of them, as this forward reads them.
        on_padding: Where codes depend on which columns are padding and nobody said so yet: takes the mask of the columns so far (True for a token), stores
            this forward's tokens anew, and returns their view.
        undo: Takes this forward's tokens back, for when it cannot go on.
    """

    __slots__ = ("on_padding", "undo", "view")

    def __init__(
        self,
        view: View,
        on_padding: Callable[[Bool[Tensor, "batch columns"]], View] | None = None,
        undo: Callable[[], object] = lambda: None,
    ) -> None:
        self.view = view
        self.on_padding = on_padding
        self.undo = undo

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values, decoded."""
        return self.view.dense()

    def _refuse(self, use: str) -> NoReturn:
        self.undo()
        raise TypeError(
            f"layer {self.view.layer}: keys and values are codes under attn_implementation {ATTENTION!r} and were used as tensors ({use}); this model's "
            'attention needs tensors: call model.set_attn_implementation("sdpa") (or "eager"), and the same cache gives it decoded ones'
        )

    def __getattr__(self, name: str) -> NoReturn:
        # Protocols that Python and torch look for must be able to learn that they are not there.
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        found = _find((*args, *(kwargs or {}).values()))
        assert found is not None
        found._refuse(getattr(func, "__name__", str(func)))


def _find(values: object) -> CodedStates | None:
    """The first handle in the arguments of a torch function, lists and tuples included."""
    if isinstance(values, CodedStates):
        return values
    if isinstance(values, list | tuple):
        return next((found for value in values if (found := _find(value)) is not None), None)
    return None


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: CodedStates, *_: object) -> NoReturn:
        self._refuse(name)

    return refuse


for _name in (
    "getitem", "setitem", "len", "iter", "contains", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul",
    "rmatmul", "pow", "neg", "lt", "le", "gt", "ge", "float", "int", "array",
):  # fmt: skip
    setattr(CodedStates, f"__{_name}__", _refusing(f"__{_name}__"))
