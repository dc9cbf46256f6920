#!/bin/bash
# A rank of launch/mpirun --pretend-hosts whose host has its name for NVSHMEM, too, with the
# transport FAR_PLUGIN, the file nvshmem_transport_ibrc.so.3. Needs root. rank.sh COMMAND...
exec unshare --uts bash -c 'hostname "$ETC_DIST_HOST"; LD_PRELOAD=$FAR_PLUGIN exec "$@"' _ "$@"
