"""Stands in for the package torch_memory_saver, which pauses CUDA memory and cannot be loaded without CUDA.

Nothing is freed here. SGLang's own bookkeeping of released tags is the real one: a second release or a resume of a
resident tag kills its scheduler, as on a GPU.
"""

from contextlib import contextmanager


@contextmanager
def configure_subprocess():
    yield


class Saver:
    hook_mode = None

    @contextmanager
    def region(self, tag=None, enable_cpu_backup=False):
        yield

    @contextmanager
    def cuda_graph(self, **options):
        yield

    @contextmanager
    def disable(self):
        yield

    def pause(self, tag=None):
        pass

    def resume(self, tag=None):
        pass


torch_memory_saver = Saver()
