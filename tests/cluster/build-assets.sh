#!/usr/bin/env bash
# Builds a real Kubernetes control plane and a real Kueue from their Go modules, once a machine.
#
#   tests/cluster/build-assets.sh           build what is missing
#   tests/cluster/build-assets.sh --dir     print where the binaries are (or would be), build nothing
#
# Exit code 0: everything is there. 3: this machine cannot build it (no Go, or one too old).
# Any other: a step failed; its log is named. Run it again: finished steps are kept.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kubernetes=$(sed -n 's/^\tk8s.io\/kubernetes v//p' "$here/assets/kubernetes/go.mod")
kueue=$(sed -n 's/^\tsigs.k8s.io\/kueue v//p' "$here/assets/kueue/go.mod")
etcd=$(sed -n 's/^\tgo.etcd.io\/etcd\/server\/v3 v//p' "$here/assets/kubernetes/go.mod")
pin="kubernetes-$kubernetes-kueue-$kueue"
dir=${MODELPOOL_CLUSTER_ASSETS:-${XDG_CACHE_HOME:-$HOME/.cache}/modelpool/cluster/$pin}

if [[ ${1-} == --dir ]]; then
    echo "$dir"
    exit 0
fi

say() { printf 'cluster assets: %s\n' "$*"; }

if [[ -f $dir/complete && $(<"$dir/complete") == "$pin" ]]; then
    say "already in $dir"
    exit 0
fi
if ! command -v go >/dev/null; then
    say "Go is not on the PATH; the cluster tier needs Go 1.26 or newer to build Kubernetes once" >&2
    exit 3
fi
# The go line of Kubernetes itself: an older Go would stop in the first step, after the downloads.
go_have=$(cd / && go env GOVERSION | sed 's/^go//; s/[^0-9.].*//')
if [[ $(printf '%s\n1.26\n' "$go_have" | sort -V | head -1) != 1.26 ]]; then
    say "Go $go_have is too old; Kubernetes $kubernetes needs Go 1.26 or newer" >&2
    exit 3
fi

mkdir -p "$dir/bin" "$dir/logs" "$dir/kueue"
# Two builds in one cache would only slow each other down: the second waits, then finds it done.
exec 9>"$dir/lock"
if command -v flock >/dev/null; then
    flock -n 9 || { say "another build is running; waiting for it"; flock 9; }
    if [[ -f $dir/complete && $(<"$dir/complete") == "$pin" ]]; then
        say "already in $dir"
        exit 0
    fi
fi

jobs=${MODELPOOL_CLUSTER_JOBS:-2}
limit_s=${MODELPOOL_CLUSTER_LIMIT_S:-1800}
started=$SECONDS
nice_19=()
command -v nice >/dev/null && nice_19=(nice -n 19)
timeout_of() { command -v timeout >/dev/null && echo "timeout $((limit_s - (SECONDS - started)))"; }

export CGO_ENABLED=0 GOWORK=off
export GOFLAGS="-mod=readonly -trimpath -buildvcs=false -p=$jobs"

# Runs a step within what is left of the limit, output to a log, one line when it ends.
step() {
    local name=$1 begun=$SECONDS
    shift
    if ((SECONDS - started >= limit_s)); then
        say "the limit of $limit_s s is used up before: $name. Run me again to go on" >&2
        exit 1
    fi
    # shellcheck disable=SC2046  # two words, or none where there is no timeout(1)
    if ! "${nice_19[@]}" $(timeout_of) "$@" >"$dir/logs/$name.log" 2>&1 9>&-; then
        tail -n 15 "$dir/logs/$name.log" >&2
        say "$name failed after $((SECONDS - begun)) s; all of it: $dir/logs/$name.log" >&2
        exit 1
    fi
    say "$name ($((SECONDS - begun)) s)"
}

# build NAME MODULE_FOLDER PACKAGE LDFLAGS: a binary appears whole or not at all.
build() {
    local name=$1 module=$2 package=$3 flags=$4 want
    want="$(cat "$here/assets/$module/go.mod" "$here/assets/$module/go.sum" | cksum) $go_have"
    if [[ -x $dir/bin/$name && -f $dir/bin/.$name && $(<"$dir/bin/.$name") == "$want" ]]; then
        return
    fi
    step "$name" env -C "$here/assets/$module" go build -ldflags "-s -w $flags" -o "$dir/bin/$name.part" "$package"
    mv "$dir/bin/$name.part" "$dir/bin/$name"
    printf '%s' "$want" >"$dir/bin/.$name"
}

# The version that /version reports and kubectl compares with its own.
stamp() {
    local package major minor
    IFS=. read -r major minor _ <<<"$kubernetes"
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        printf -- '-X %s.gitVersion=v%s -X %s.gitMajor=%s -X %s.gitMinor=%s -X %s.gitTreeState=clean ' \
            "$package" "$kubernetes" "$package" "$major" "$package" "$minor" "$package"
    done
}

say "building Kubernetes $kubernetes, etcd $etcd and Kueue $kueue into $dir (once; minutes)"
step download-kubernetes env -C "$here/assets/kubernetes" go list -deps \
    k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-controller-manager \
    k8s.io/kubernetes/cmd/kube-scheduler k8s.io/kubernetes/cmd/kubectl go.etcd.io/etcd/server/v3
step download-kueue env -C "$here/assets/kueue" go list -deps sigs.k8s.io/kueue/cmd/kueue

build etcd kubernetes go.etcd.io/etcd/server/v3 ""
for name in kube-apiserver kube-controller-manager kube-scheduler kubectl; do
    build "$name" kubernetes "k8s.io/kubernetes/cmd/$name" "$(stamp)"
done
build kueue kueue sigs.k8s.io/kueue/cmd/kueue "-X sigs.k8s.io/kueue/pkg/version.GitVersion=v$kueue"

# Kueue's API and webhook registrations travel in its module; the harness edits the webhooks' address.
config=$(cd "$here/assets/kueue" && go list -m -f '{{.Dir}}' sigs.k8s.io/kueue)/config/components
rm -rf "$dir/kueue.part"
mkdir -p "$dir/kueue.part"
cp -R "$config/crd/bases" "$dir/kueue.part/crds"
cp "$config/webhook/manifests.yaml" "$dir/kueue.part/webhooks.yaml"
chmod -R u+w "$dir/kueue.part"
rm -rf "$dir/kueue"
mv "$dir/kueue.part" "$dir/kueue"

printf '%s' "$pin" >"$dir/complete.part"
mv "$dir/complete.part" "$dir/complete"
say "done in $((SECONDS - started)) s: $dir"
