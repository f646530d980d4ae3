"""Stands in for the package torch_memory_saver, which pauses CUDA memory and cannot be loaded without CUDA.

No memory is freed here, but what an engine makes of it is as on a GPU: a second pause of a tag ends the scheduler, as
does a resume of what is not paused (SGLang's own books say so), and weights that were not backed up come back spoilt.

MEMORY_SAVER_BOOKS names a file that says, as a JSON list, which tags are paused: SGLang itself does not tell.
"""

import json
import os
import weakref
from contextlib import contextmanager


@contextmanager
def configure_subprocess():
    yield


class Saver:
    hook_mode = None

    def __init__(self):
        self.paused = set()
        self.modules = weakref.WeakSet()
        """Those with weights that come back spoilt."""

    @contextmanager
    def region(self, tag=None, enable_cpu_backup=False):
        if tag != "weights" or enable_cpu_backup:
            yield
            return
        from torch.nn.modules.module import register_module_parameter_registration_hook

        hook = register_module_parameter_registration_hook(lambda module, name, parameter: self.modules.add(module))
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def cuda_graph(self, **options):
        yield

    @contextmanager
    def disable(self):
        yield

    def pause(self, tag=None):
        if tag in self.paused:
            raise RuntimeError(f"cannot pause {tag}: it is not active")
        self._change({tag})
        if tag == "weights":
            for parameter in (parameter for module in self.modules for parameter in module.parameters(recurse=False)):
                parameter.data.fill_(0.5)

    def resume(self, tag=None):
        if tag not in self.paused:
            raise RuntimeError(f"cannot resume {tag}: it is not paused")
        self._change({tag})

    def _change(self, tags):
        self.paused ^= tags
        books = os.environ.get("MEMORY_SAVER_BOOKS")
        if books:
            with open(f"{books}.partial", "w") as file:
                json.dump(sorted(self.paused), file)
            os.replace(f"{books}.partial", books)


torch_memory_saver = Saver()
