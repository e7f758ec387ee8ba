#!/bin/sh
#
# Transform one message at a time, in POSIX shell and awk (mawk, gawk, busybox and
# the original awk alike).
#
# Each word of a message becomes a message of its own, so there are none, one or
# many replies. As a T stage: `command: [sh, transform.sh]`.
#
# Not for: other markers than the default ones, and messages with a NUL, which not
# every awk can hold. Any other byte may occur.

if [ "${ETLSTAGE_EOM-\\012}${ETLSTAGE_EOP-\\000}" != '\012\000' ]; then
    echo "transform.sh: only the default markers are supported" >&2
    exit 2
fi

# Bytes are bytes: no awk tries to read them as UTF-8.
LC_ALL=C
export LC_ALL

# awk must not read the input itself: mawk waits for a full block of 4096 bytes,
# while the supervisor waits for the answer to the message it sent. One dd takes
# what is there, up to 64 KiB, and never waits for more. That costs a process per
# chunk, a millisecond; a loop of `read` with an awk per message costs more.
exec awk '
# Reply with each word. A function like this one is all that a worker of yours needs.
function transform(message,    words, n, i) {
    n = split(message, words, " ")
    for (i = 1; i <= n; i++) printf "%s\n", words[i]
}

# Read what is there into line[1] ... line[count], all whole; 0 at the end of input.
function read_lines(    text, n) {
    fflush()    # about to wait: what we hold back is what the supervisor waits for
    while ((chunk | getline text) > 0) line[++n] = text
    close(chunk)
    if (!n) exit 1                            # no dot: dd failed
    if (n == 1 && line[1] == ".") return 0    # dd had nothing to read
    line[1] = rest line[1]
    # The last line has no EOM yet; the dot after it was ours.
    rest = substr(line[n], 1, length(line[n]) - 1)
    count = n - 1
    return 1
}

BEGIN {
    # getline cannot tell a line that is cut off from a whole one. With a dot at
    # the end the last line is always the one that is cut off, even if empty.
    chunk = "dd bs=65536 count=1 2>/dev/null && echo ."
    while (read_lines())
        for (k = 1; k <= count; k++) {
            transform(line[k])
            printf "%c", 0    # EOP; "\0" would end the string in some awks
        }
}'
