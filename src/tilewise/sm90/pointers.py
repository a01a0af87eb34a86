"""What is known of an address."""

from tilewise.sm90.dsl import cute


def known(pointer: cute.Pointer, multiple: int) -> cute.Pointer:
    """The pointer, which lies at a multiple of `multiple` bytes, as a wide copy has to know. Its own `align` rounds it up, by two operations."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=multiple)
