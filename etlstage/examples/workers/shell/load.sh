#!/bin/sh
#
# Load one message at a time, in POSIX shell.
#
# Each message becomes a line of a file. As an L stage:
# `command: [sh, load.sh, out.txt]`.
#
# Not for: other markers than the default ones, and messages with a NUL, which a
# shell variable cannot hold. Any other byte may occur.

if [ "${ETLSTAGE_EOM-\\012}${ETLSTAGE_EOP-\\000}" != '\012\000' ]; then
    echo "load.sh: only the default markers are supported" >&2
    exit 2
fi

# Bytes are bytes: no shell tries to read them as UTF-8.
LC_ALL=C
export LC_ALL

# read takes one byte at a time, so that it never waits for more than a line, and
# printf writes at once: slow for big messages, but nothing can get stuck. For a
# faster loop see transform.sh.
# IFS= keeps the blanks at both ends, -r keeps backslashes.
while IFS= read -r message; do
    printf '%s\n' "$message" >>"$1" || exit 1
    # EOP is the receipt: the supervisor may forget the message now.
    printf '\000'
done
