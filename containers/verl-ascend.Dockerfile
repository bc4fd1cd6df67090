# syntax=docker/dockerfile:1
# VeRL 0.9.1 on Ascend NPUs (Atlas A2; for A3 take the -a3- tag).
# Build at the repository's root, after make wheelhouse:
#   docker build -f containers/verl-ascend.Dockerfile -t rlprobe/verl-ascend .
# torch_npu loads the host's driver, which a build host lacks. The test below imports what needs no
# driver; `rlprobe doctor` imports torch_npu, msprobe, ray and the framework in the image, on the node.
ARG BASE=quay.io/ascend/verl:v0.9.1-cann9.1.0-torch_npu2.10.0.post4-910b-ubuntu22.04-py3.12-vllm
FROM ${BASE}
ARG BASE
ARG WHEELS=wheelhouse/beside
LABEL org.rlprobe.image=verl-ascend org.rlprobe.base=${BASE}
COPY containers/install /opt/rlprobe/install
COPY containers/requirements/beside.txt /opt/rlprobe/install/
# Bound, not copied: a layer would keep the wheels for ever.
RUN --mount=type=bind,source=${WHEELS},target=/wheels \
    WHEELS=/wheels /bin/bash /opt/rlprobe/install/verl-ascend.sh
ENV PYTHONNOUSERSITE=1 LC_ALL=C.UTF-8
RUN /bin/bash /opt/rlprobe/install/check.sh h5py yaml rlprobe
