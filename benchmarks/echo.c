/* The fastest worker we can think of: each message is its own reply.
   Reads what is there, writes it back with EOP behind each EOM. */
#include <string.h>
#include <unistd.h>

static char in[1 << 20], out[1 << 21];

int main(void) {
    ssize_t got;
    while ((got = read(0, in, sizeof in)) > 0) {
        char *from = in, *end = in + got, *to = out, *eom;
        while (from < end && (eom = memchr(from, '\n', end - from))) {
            size_t size = eom - from + 1;
            memcpy(to, from, size);
            to += size;
            *to++ = '\0';
            from += size;
        }
        memcpy(to, from, end - from);
        to += end - from;
        for (char *at = out; at < to;) {
            ssize_t wrote = write(1, at, to - at);
            if (wrote < 0) return 1;
            at += wrote;
        }
    }
    return 0;
}
