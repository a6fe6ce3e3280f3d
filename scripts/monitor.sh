#!/usr/bin/env bash
# What a run takes and how far it is, every two seconds: GPUs, processors, memory, disk, its last step.
#
#   bash scripts/monitor.sh [OUTPUT_DIR]
output=${1:-outputs}
while :; do
  place=$output
  until [ -e "$place" ]; do place=$(dirname -- "$place"); done
  gpus=$(nvidia-smi --query-gpu=index,utilization.gpu,memory.used,memory.total --format=csv,noheader 2>/dev/null |
    sed 's/^\([^,]*\), \([^,]*\), \([^,]*\), \(.*\)$/  \1: \2 busy, \3 of \4/')
  if [ -r /proc/meminfo ]; then
    memory=$(awk '/^MemTotal/ { all = $2 } /^MemAvailable/ { free = $2 }
      END { printf "%.1f of %.1f GiB", (all - free) / 1048576, all / 1048576 }' /proc/meminfo)
  else
    memory="see Activity Monitor"
  fi
  steps=$(cat -- "$output"/logs/*.log 2>/dev/null | grep -E ' Step [0-9]+' | sort -s -k1,1 | tail -n 2 | cut -c1-180)
  printf '\033[H\033[2J%s  %s\n\n' "$(date '+%H:%M:%S')" "$output"
  printf 'GPU     %s\n' "${gpus:-none}"
  printf 'CPU     load %s on %s cores\n' "$(uptime | sed 's/.*averages*: //')" "$(getconf _NPROCESSORS_ONLN)"
  printf 'Memory  %s\n' "$memory"
  printf 'Disk    %s\n\n' "$(df -Ph -- "$place" | awk 'NR == 2 { print $3 " of " $2 " used, " $4 " left" }')"
  printf '%s\n' "${steps:-no step yet}"
  sleep 2
done
