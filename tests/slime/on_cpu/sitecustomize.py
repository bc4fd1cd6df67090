"""Where slime is imported, torch.cuda's names are put on the CPU first."""

import sys


class _BeforeSlime:
    def find_spec(self, name, path=None, target=None):
        if name == "slime":
            sys.meta_path.remove(self)
            import cuda_on_cpu

            cuda_on_cpu.enable()


sys.meta_path.insert(0, _BeforeSlime())
