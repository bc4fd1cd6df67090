# syntax=docker/dockerfile:1
# Compare, diagnose and report, without torch.
# Build at the repository's root, after make wheelhouse:
#   docker build -f containers/compare.Dockerfile -t rlprobe/compare .
ARG BASE=debian:12.12-slim
FROM ${BASE}
ARG BASE
ARG WHEELS=wheelhouse/compare
LABEL org.rlprobe.image=compare org.rlprobe.base=${BASE}
COPY containers/install /opt/rlprobe/install
COPY containers/requirements/compare.txt /opt/rlprobe/install/
# Bound, not copied: a layer would keep the wheels for ever.
RUN --mount=type=bind,source=${WHEELS},target=/wheels \
    WHEELS=/wheels /bin/bash /opt/rlprobe/install/compare.sh
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV PYTHONNOUSERSITE=1 LC_ALL=C.UTF-8
RUN /bin/bash /opt/rlprobe/install/check.sh polars numba msgspec pydantic jinja2 h5py rlprobe
