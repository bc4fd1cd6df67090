"""The batch is trained on in another order of rows (verl#7758)."""

from collections.abc import Iterator

from rlprobe.selftest import Site, fault


@fault(stage="critic_update", cause="row_order", verdict="not_comparable")
def rows_in_another_order(site: Site) -> Iterator[None]:
    rows = list(range(site.batch.batch_size[0]))
    for name, value in list(site.batch.items()):
        if hasattr(value, "unbind") and hasattr(value, "is_nested"):
            import torch

            parts = value.unbind()
            reordered = [parts[row] for row in reversed(rows)]
            site.batch[name] = (
                torch.nested.as_nested_tensor(reordered, layout=torch.jagged)
                if value.is_nested
                else torch.stack(reordered)
            )
    yield
