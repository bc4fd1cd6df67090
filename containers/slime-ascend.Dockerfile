# syntax=docker/dockerfile:1
# slime v0.2.2 on Ascend NPUs.
# Build at the repository's root, after make wheelhouse:
#   docker build -f containers/slime-ascend.Dockerfile -t rlprobe/slime-ascend .
# Nobody publishes this base: build it from a CANN image with quick_install.sh of the Ascend port
# (docs/cluster.md), and give it as BASE.
# torch_npu loads the host's driver, which a build host lacks. The test below imports what needs no
# driver; `rlprobe doctor` imports torch_npu, msprobe, ray and the framework in the image, on the node.
ARG BASE=slime-ascend:v0.2.2
FROM ${BASE}
ARG BASE
ARG WHEELS=wheelhouse/beside
LABEL org.rlprobe.image=slime-ascend org.rlprobe.base=${BASE}
COPY containers/install /opt/rlprobe/install
COPY containers/requirements/beside.txt /opt/rlprobe/install/
# Bound, not copied: a layer would keep the wheels for ever.
RUN --mount=type=bind,source=${WHEELS},target=/wheels \
    WHEELS=/wheels /bin/bash /opt/rlprobe/install/slime-ascend.sh
ENV PYTHONNOUSERSITE=1 LC_ALL=C.UTF-8
RUN /bin/bash /opt/rlprobe/install/check.sh h5py yaml rlprobe
