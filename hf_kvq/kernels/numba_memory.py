"""Memory by its address inside numba: an array object for each tensor would cost more than the work on a short one."""

from __future__ import annotations

from typing import no_type_check

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["memory", "pointer", "prefetch"]


@intrinsic
@no_type_check
def pointer(typing_context, address):
    """An address as a pointer, for `numba.carray`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@numba.njit(cache=True)
@no_type_check
def memory(address, dtype):
    """Memory from an address on. Its end is unknown here; no index is checked against it."""
    return numba.carray(pointer(address), (1 << 40,), dtype)


@intrinsic
@no_type_check
def prefetch(typing_context, array, place):
    """Ask for the cache line of `array[place]`, which need not exist: a hint reads nothing."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(hint, [pointer, flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(array, place), generate
