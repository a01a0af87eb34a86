"""Room for a kernel's code, which its first launch on a GPU loads, in memory that torch's allocator may keep unused: for Hopper's and Triton's."""

import torch

LEAST = 16 << 20  # bytes that are free for the driver: a kernel's code takes 0.2 MB of them, in blocks of 2


def make_room() -> None:
    """Give the driver the blocks that torch keeps unused, where the current GPU has hardly any memory left, as torch does for its own tensors.

    A launch that does without fails by an unknown error, and so do all later ones of that kernel, whatever is free by then.

    Raises:
        torch.OutOfMemoryError: there is too little all the same.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing() or torch.cuda.mem_get_info()[0] >= LEAST:
        return
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if free < LEAST:
        raise torch.OutOfMemoryError(
            f"a kernel's first launch needs {LEAST >> 20} MB of the GPU's memory beside torch's, and {free >> 20} of {total >> 20} MB are free: "
            "take a smaller batch, or leave it room by torch.cuda.set_per_process_memory_fraction"
        )
