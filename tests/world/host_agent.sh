#!/bin/sh
# The "ssh" of MPICH's mpiexec: starts a host's daemon on this machine. Its ranks count
# as ranks on the host of that name.
while [ "${1#-}" != "$1" ]; do shift; done
export ETC_DIST_HOST="$1"
shift
exec sh -c "$*"
