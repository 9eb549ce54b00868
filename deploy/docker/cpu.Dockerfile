# Processors. The native kernels are compiled while the image is built.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/inferplane
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 \
    && rm -rf /var/lib/apt/lists/*
ENV OMP_WAIT_POLICY=passive
COPY pyproject.toml constraints.txt setup.p[y] README.md LICENSE ./
COPY core core
COPY backends backends
RUN pip install -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu ".[serving]"

RUN useradd --system --uid 10001 --home-dir /nonexistent inferplane
USER 10001
WORKDIR /
EXPOSE 8000 8811
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["inferplane", "serve", "--host", "0.0.0.0", "--device", "cpu"]
CMD ["demo"]
