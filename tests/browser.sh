#!/usr/bin/env bash
# Install Chromium for the tests of the book, as root where apt-get is at hand; else say in a line what is missing.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing Chromium for the tests of the book."
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 && exit 0
fi
echo "No Chromium here, and none could be installed (that takes root and apt-get): what needs a browser can't run."
