"""Named tuples that kernels read by address instead of as hundreds of arguments.

Numba passes each number and each part of each array of a tuple on its own. That is most of the code
of a kernel, and most of the time that its compilation takes.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils, imputils
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.cpython import listobj
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, register_model

TupleT = TypeVar("TupleT")


class Borrowed(types.Type):
    """A named tuple at an address, kept by a function that called this one."""

    def __init__(self, owned: types.NamedTuple) -> None:
        self.owned = owned
        super().__init__(name=f"Borrowed({owned})")


@register_model(Borrowed)
class _BorrowedModel(models.PrimitiveModel):
    def __init__(self, manager: Any, borrowed: Borrowed) -> None:
        pointer = ir.PointerType(manager.lookup(borrowed.owned).get_data_type())
        super().__init__(manager, borrowed, pointer)  # type: ignore[no-untyped-call]


@infer_getattr
class _BorrowedFields(AttributeTemplate):
    key = Borrowed

    def generic_resolve(self, borrowed: Borrowed, name: str) -> Any:  # type: ignore[override]
        """Return the type of a field; a field that is a named tuple is borrowed as well."""
        if name not in borrowed.owned.fields:
            return None
        field = borrowed.owned[borrowed.owned.fields.index(name)]
        return Borrowed(field) if isinstance(field, types.NamedTuple) else field


@lower_getattr_generic(Borrowed)
def _load_field(context: Any, builder: Any, borrowed: Borrowed, address: Any, name: str) -> Any:
    index = borrowed.owned.fields.index(name)
    field, place = borrowed.owned[index], cgutils.gep_inbounds(builder, address, 0, index)
    if isinstance(field, types.NamedTuple):
        return place
    value = context.data_model_manager[field].load_from_data_pointer(builder, place)
    return imputils.impl_ret_borrowed(context, builder, field, value)


def _borrow(_context: Any, owned: types.NamedTuple) -> Any:

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        model = context.data_model_manager[owned]
        place = cgutils.alloca_once(builder, model.get_data_type())
        builder.store(model.as_data(builder, arguments[0]), place)
        return place

    return Borrowed(owned)(owned), generate


def _borrow_item(_context: Any, items: types.List, index: types.Integer) -> Any:

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return listobj.ListInstance(context, builder, items, arguments[0])._gep(arguments[1])

    return Borrowed(items.dtype)(items, types.intp), generate


borrow: Callable[[TupleT], TupleT] = cast(Any, intrinsic(_borrow))
"""Return the address of a named tuple, valid while the calling function runs and keeps the tuple."""
borrow_item: Callable[[list[TupleT], int], TupleT] = cast(Any, intrinsic(_borrow_item))
"""Return the address of a list's item, valid while the list is kept and keeps its length."""
