"""AVX2 kernels where the others use the generic ones or AVX-512."""

from collections.abc import Iterator

from rlprobe.selftest import Site, benign


@benign(needs={"environment": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"}})
def other_instruction_set(site: Site) -> Iterator[None]:
    yield
