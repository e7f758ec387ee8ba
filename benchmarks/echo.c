/* The fastest worker we can think of: each message is its own reply.
   Reads what is there, writes each whole message back with EOM and EOP.
   With an argument, a message that ends in 0 is answered by nothing, one that ends in
   1 by itself, twice. */
#include <string.h>
#include <unistd.h>

static char in[1 << 20], out[3 << 20];

int main(int argc, char **argv) {
    (void)argv;
    size_t rest = 0;
    ssize_t got;
    while ((got = read(0, in + rest, sizeof in - rest)) > 0) {
        char *from = in, *end = in + rest + got, *to = out, *eom;
        while (from < end && (eom = memchr(from, '\n', end - from))) {
            size_t size = eom - from + 1;
            char last = argc > 1 && size > 1 ? eom[-1] : ' ';
            for (int times = last == '0' ? 0 : last == '1' ? 2 : 1; times; times--) {
                memcpy(to, from, size);
                to += size;
            }
            *to++ = '\0';
            from += size;
        }
        rest = end - from;
        memmove(in, from, rest);
        for (char *at = out; at < to;) {
            ssize_t wrote = write(1, at, to - at);
            if (wrote < 0) return 1;
            at += wrote;
        }
    }
    return 0;
}
