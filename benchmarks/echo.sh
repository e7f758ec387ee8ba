#!/bin/sh
# The identity in POSIX shell and awk: each message is its own reply.
# For the default markers. What the dd is for: etlstage/examples/workers/shell.

LC_ALL=C
export LC_ALL

exec awk '
function read_lines(    text, n) {
    fflush()
    while ((chunk | getline text) > 0) line[++n] = text
    close(chunk)
    if (!n) exit 1
    if (n == 1 && line[1] == ".") return 0
    line[1] = rest line[1]
    rest = substr(line[n], 1, length(line[n]) - 1)
    count = n - 1
    return 1
}

BEGIN {
    chunk = "dd bs=65536 count=1 2>/dev/null && echo ."
    while (read_lines())
        for (k = 1; k <= count; k++) printf "%s\n%c", line[k], 0
}'
