#!/bin/sh
# What a container starts: `serve`, unless the first word is another verb of the command line.
#
#   entrypoint.sh                      serves the model of INFERPLANE_MODEL, else the demo model
#   entrypoint.sh qwen3:0.6b --offline serves that model
#   entrypoint.sh doctor               any verb of `inferplane`
#   entrypoint.sh health               exit code 0 if the server in this container is ready
#   entrypoint.sh /bin/bash -c '...'   a shell, or start_server, which serves as the source system's images do
#
# A container has the same ports everywhere: 8000 for all routes, 8001 for health, 8002 for metrics, unless a variable says
# otherwise, Inferplane's or the source system's. Other settings come as usual: flags, INFERPLANE_..., INFERPLANE_CONFIG.
set -eu

case ${1:-} in
    bash | sh | /bin/* | /usr/bin/* | start_server | stop_server)
        exec "$@"
        ;;
esac

# start_server writes which port answers health.
started=${INFERPLANE_SERVER_DIR:-${XDG_STATE_HOME:-${HOME:-/tmp}/.local/state}/inferplane}/health_port
if [ "${1:-}" = health ] && [ -f "$started" ]; then
    INFERPLANE_HEALTH_PORT=$(cat "$started")
    export INFERPLANE_HEALTH_PORT
fi

set_default() { # value, then a variable, and other names of it
    value=$1 name=$2
    shift
    for other; do
        eval "given=\${$other:-}"
        if [ -n "$given" ]; then
            return
        fi
    done
    export "$name=$value"
}

set_default 0.0.0.0 INFERPLANE_HOST
set_default 8000 INFERPLANE_PORT SERVICE_HTTP_PORT PUSH_MODE_HTTP_PORT
set_default 8001 INFERPLANE_HEALTH_PORT HEALTH_HTTP_PORT HTTP_PORT
set_default 8002 INFERPLANE_METRICS_PORT METRICS_HTTP_PORT METRICS_PORT

case ${1:-} in
    health)
        exec python3 -c 'import sys, urllib.request as r; r.urlopen(f"http://127.0.0.1:{sys.argv[1]}/v2/health/ready", timeout=4)' \
            "${INFERPLANE_HEALTH_PORT:-${HEALTH_HTTP_PORT:-$HTTP_PORT}}"
        ;;
    generate | chat | serve | pull | list | export | quantize | eval | audit | convert | show | rm | config | devices | doctor | explain | estimate | ops | conform | tune | bench)
        exec inferplane "$@"
        ;;
    *)
        exec inferplane serve "$@"
        ;;
esac
