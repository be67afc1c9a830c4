#!/usr/bin/env bash
# get-hiprtc.sh: the real hiprtc, AMD's run-time compiler, on a machine without ROCm or a GPU.
#
# Unpacks Debian's packages of it below the user's cache (about 300 MB; 15 seconds) and prints the folder. Nothing is
# installed: they need a newer C library than stable releases have, so they are started through their own loader. The
# mirror and the keyring are the ones that this system uses; apt checks the signatures.
set -eu

SUITE=experimental
PACKAGES="libhiprtc7 libamdhip64-dev rocm-device-libs-22"
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

cache=${XDG_CACHE_HOME:-$HOME/.cache}/pyllm
target=$cache/hiprtc-$SUITE
if [ -e "$target/usr/lib/x86_64-linux-gnu/libhiprtc.so.7" ]; then
    echo "$target"
    exit
fi

fail() {
    echo "hiprtc cannot be fetched: $*" >&2
    exit 1
}
[ "$(uname -m)" = x86_64 ] || fail "Debian builds it for x86-64 only, and this is $(uname -m)"
command -v apt-get > /dev/null || fail "apt-get is not here"
command -v dpkg > /dev/null || fail "dpkg is not here"
[ -r "$KEYRING" ] || fail "$KEYRING is not here; install debian-archive-keyring"
mirror=$(sed -n 's/^URIs:[[:space:]]*//p; s/^deb[[:space:]]\+\(\[[^]]*\][[:space:]]*\)\?\([^[:space:]]*\).*/\2/p' \
    /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2> /dev/null | head -n 1)
mirror=${mirror%% *}
[ -n "$mirror" ] || mirror=http://deb.debian.org/debian

mkdir -p "$cache"
work=$(mktemp -d "$cache/hiprtc-XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/root"
touch "$work/status"
for suite in sid $SUITE; do
    echo "deb [signed-by=$KEYRING] $mirror $suite main"
done > "$work/sources.list"
apt() {
    apt-get -qq \
        -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- \
        -o Dir::State="$work" -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" \
        -o Dir::Cache="$work" -o Dir::Cache::archives="$work/archives" \
        -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1 -o Acquire::Languages=none "$@" >&2
}
apt update || fail "the package lists of $mirror cannot be read"
# shellcheck disable=SC2086
apt -y --no-install-recommends --download-only -t $SUITE install $PACKAGES || fail "$mirror does not have $PACKAGES"
for package in "$work"/archives/*.deb; do
    dpkg -x "$package" "$work/root"
done
mv -T "$work/root" "$target" 2> /dev/null || [ -e "$target" ] || fail "$target cannot be written"
echo "$target"
