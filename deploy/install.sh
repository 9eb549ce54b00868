#!/bin/sh
# Installs Inferplane from the working folder into an environment: `install.sh FOLDER`; called by the Dockerfile.
#
# Variables: DEVICE, CUDA, TORCH_INDEX and EXTRAS, as the Dockerfile describes them. What is installed for the system, as
# a vendor's torch is, stays visible and in its version.
set -eu

target=$1
device=${DEVICE:-cpu}
index=${TORCH_INDEX:-}

if [ -z "$index" ]; then
    case $device in
        cpu | xpu) index=https://download.pytorch.org/whl/$device ;;
        cuda) index=https://download.pytorch.org/whl/cu$(echo "${CUDA:?of the base image}" | cut -d. -f1,2 | tr -d .) ;;
    esac
fi

python3 -m venv --system-site-packages "$target"
python3 -m pip list --format=freeze 2> /dev/null | grep -iE '^(torch|triton|numpy)' > vendor.txt || true
pins=constraints.txt
if grep -qiE '^torch==' vendor.txt; then
    pins=vendor.txt
fi
echo "installing for $device with the versions of $pins, torch from ${index:-the image or the default index}"
# shellcheck disable=SC2086  # two words, or none
"$target/bin/python" -m pip install -c "$pins" ${index:+--extra-index-url "$index"} ".[${EXTRAS:-serving}]"
"$target/bin/python" -c "import importlib.metadata as m; print('inferplane', m.version('inferplane'), 'with torch', m.version('torch'))"
