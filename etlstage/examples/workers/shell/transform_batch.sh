#!/bin/sh
#
# Transform batches that the supervisor closes, in POSIX shell and awk (mawk, gawk,
# busybox and the original awk alike).
#
# Messages that occur more than once in a batch are passed on once. As a T stage:
# `command: [sh, transform_batch.sh]`.
#
# Not for: other markers than the default ones, and messages with a NUL, which not
# every awk can hold. Any other byte may occur.

markers="${ETLSTAGE_EOM-\\012}${ETLSTAGE_EOP-\\000}${ETLSTAGE_EOB-\\027}"
if [ "$markers" != '\012\000\027' ]; then
    echo "transform_batch.sh: only the default markers are supported" >&2
    exit 2
fi

# Bytes are bytes: no awk tries to read them as UTF-8.
LC_ALL=C
export LC_ALL

# awk must not read the input itself: mawk waits for a full block of 4096 bytes,
# and each awk waits for the end of a line, which does not come after an EOB. One dd
# takes what is there, up to 64 KiB, and never waits for more.
exec awk '
# Reply to messages[1] ... messages[n]; n is 0 for an empty batch.
function transform_batch(messages, n,    seen, i) {
    for (i = 1; i <= n; i++) if (!seen[messages[i]]++) printf "%s\n", messages[i]
}

# Answer a batch, of which each message has an EOM; what follows the last is none.
function answer(text,    messages, n) {
    n = split(text, messages, "\027")
    transform_batch(messages, n ? n - 1 : 0)
    printf "%c", 0    # EOP; "\0" would end the string in some awks
}

# Read what is there into batch[1] ... batch[count], all whole; 0 at the end of input.
function read_batches(    text, n) {
    fflush()    # about to wait: what we hold back is what the supervisor waits for
    while ((chunk | getline text) > 0) batch[++n] = text
    close(chunk)
    if (!n) exit 1                             # no dot: dd failed
    if (n == 1 && batch[1] == ".") return 0    # dd had nothing to read
    batch[1] = rest batch[1]
    # The last batch has no EOB yet; the dot after it was ours.
    rest = substr(batch[n], 1, length(batch[n]) - 1)
    count = n - 1
    return 1
}

BEGIN {
    # tr swaps the two markers: EOB ends a line, and EOM separates within it, so that
    # getline reads a batch. The dot makes the last line the one that is cut off.
    chunk = "dd bs=65536 count=1 2>/dev/null && printf \".\\027\""
    chunk = "{ " chunk "; } | tr \"\\012\\027\" \"\\027\\012\""
    while (read_batches()) for (k = 1; k <= count; k++) answer(batch[k])
    # The end of the input closes the last batch.
    if (index(rest, "\027")) answer(rest)
}'
