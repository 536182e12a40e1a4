"""The backends and modes of torch.compile."""

from __future__ import annotations

from ...args.field import nearest
from ...args.problems import shown


def problem_of_compilation(backend: str, mode: str | None) -> str | None:
    """What is wrong with a backend and a mode of torch.compile, or None. Imports torch's compiler if it is needed."""
    if backend != "inductor":
        from torch._dynamo import list_backends

        known = list_backends(exclude_tags=())
        if backend not in known:
            return (
                f"{shown('torch_compile_backend', backend)}: must be one of {', '.join(known)}{nearest(backend, known)}"
            )
    if mode is not None:
        from torch._inductor import list_mode_options

        modes = list(list_mode_options())
        if mode not in modes:
            return f"{shown('torch_compile_mode', mode)}: must be one of {', '.join(modes)}{nearest(mode, modes)}"
    return None
