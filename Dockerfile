# Manta and Ray in one image, for `docker run`, KubeRay and Ray's cluster launcher; docs/deploy.md says how.
#
#   docker build --tag manta .                                                       # CPU
#   docker build --tag manta:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .  # torch with CUDA
#
# BASE names the version, and by its digest the content: the same image for ever. This prints the digest of another one:
#
#   docker buildx imagetools inspect python:3.12.14-slim-bookworm --format '{{.Manifest.Digest}}'
ARG BASE=python:3.12.14-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579

# ---- The environment: what pip needs to make it stays in this stage.
FROM ${BASE} AS environment
RUN python -m venv /opt/manta
ENV PATH=/opt/manta/bin:$PATH
WORKDIR /build

# The dependencies have a layer of their own, which stays while the sources change. configs/image/requirements.txt names
# the version and the hashes of each; only torch, whose index says which build it is, comes without one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md ./
COPY configs/image configs/image/
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes --requirement configs/image/requirements.txt \
    && python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], sep="\n")' > /tmp/requirements.txt \
    && pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch' /tmp/requirements.txt)"

COPY manta manta/
COPY cluster cluster/
COPY specdecode specdecode/
COPY workers workers/
COPY structured structured/
COPY configs/demo configs/demo/
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

# ---- The image.
FROM ${BASE}
# g++ compiles the kernels for the processor at hand, at first use. The probes call wget, the launcher rsync.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ rsync wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 manta \
    && runuser --user manta -- mkdir --parents /home/manta/.cache/huggingface
COPY --from=environment /opt/manta /opt/manta
ENV PATH=/opt/manta/bin:$PATH RAY_USAGE_STATS_ENABLED=0

USER 1000
WORKDIR /home/manta
EXPOSE 8000
# A first start downloads the model, which may take long. Kubernetes has probes of its own and ignores this.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["wget", "--quiet", "--output-document=/dev/null", "http://127.0.0.1:8000/health"]
CMD ["manta", "serve", "--set", "host=0.0.0.0"]
