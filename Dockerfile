# Manta and Ray in one image, for `docker run`, KubeRay and Ray's cluster launcher; docs/deploy.md says how.
#
#   docker build --tag manta .                                                       # CPU
#   docker build --tag manta:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .  # torch with CUDA
FROM python:3.12-slim-bookworm

# g++ compiles the kernels for the processor at hand, at first use. KubeRay's probes call wget, the launcher rsync.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ rsync wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 manta \
    && runuser --user manta -- mkdir --parents /home/manta/.cache/huggingface

WORKDIR /opt/manta

# The dependencies have a layer of their own, which stays while the sources change. torch goes first and alone, so that
# its index says which build it is and everything else comes from PyPI.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md ./
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], *project["optional-dependencies"]["otel"], sep="\n")' > /tmp/requirements.txt \
    && pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch' /tmp/requirements.txt)" \
    && pip install --no-cache-dir --requirement /tmp/requirements.txt \
    && rm /tmp/requirements.txt

COPY manta manta/
COPY cluster cluster/
COPY specdecode specdecode/
COPY workers workers/
COPY structured structured/
COPY configs/demo configs/demo/
RUN pip install --no-cache-dir --no-deps --editable .

USER 1000
WORKDIR /home/manta
ENV RAY_USAGE_STATS_ENABLED=0
EXPOSE 8000
CMD ["manta", "serve", "--set", "host=0.0.0.0"]
