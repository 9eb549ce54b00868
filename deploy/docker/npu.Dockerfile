# Ascend. BASE: an image with CANN, torch and torch-npu in versions that fit each other.
ARG BASE
FROM ${BASE}

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/inferplane
# Whatever torch the base image brings stays: the vendor built it for this device.
RUN pip freeze | grep -i "^torch" > /tmp/vendor.txt
ENV TORCH_DEVICE_BACKEND_AUTOLOAD=0
COPY pyproject.toml constraints.txt setup.p[y] README.md LICENSE ./
COPY core core
COPY backends backends
RUN pip install -c /tmp/vendor.txt ".[serving]"

RUN useradd --system --uid 10001 --home-dir /nonexistent inferplane
USER 10001
WORKDIR /
EXPOSE 8000 8811
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["inferplane", "serve", "--host", "0.0.0.0", "--device", "npu"]
CMD ["demo"]
