#!/bin/bash
# rank.sh COMMAND...: a rank of launch/mpirun --pretend-hosts, with the host name ETC_DIST_HOST, by
# which NVSHMEM distinguishes hosts, and the transport FAR_PLUGIN (transport.cpp, built as
# nvshmem_transport_ibrc.so.3). Needs root.
exec unshare --uts bash -c 'hostname "$ETC_DIST_HOST"; LD_PRELOAD=$FAR_PLUGIN exec "$@"' _ "$@"
