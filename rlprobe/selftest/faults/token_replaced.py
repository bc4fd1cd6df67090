"""A replayed response differs in one token."""

from collections.abc import Iterator

from rlprobe.selftest import Site, fault


@fault(stage="actor_compute_log_prob", cause="data", verdict="not_comparable")
def token_replaced(site: Site) -> Iterator[None]:
    for name in ("responses", "input_ids"):
        value = site.batch[name]
        # input_ids is jagged: its last value is the last row's last token, as in responses
        flat = value.values() if value.is_nested else value.view(-1)
        flat[-1] = (flat[-1] + 1) % 200
    yield
