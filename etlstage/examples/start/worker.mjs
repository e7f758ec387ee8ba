/*
 * Clean names: drop the blanks around them, refuse a line without a name.
 *
 * A reply is any number of lines and a NUL; a refusal is its reason and a NAK.
 */

// Not by node:readline, for which a carriage return ends a line, too.
// Names are text: a byte that is not UTF-8 becomes U+FFFD.
process.stdin.setEncoding("utf8");
let rest = "";
for await (const chunk of process.stdin) {
  const lines = (rest + chunk).split("\n");
  rest = lines.pop();
  for (const line of lines) {
    const name = line.trim();
    process.stdout.write(name ? `${name}\n\0` : "no name\x15");
  }
}
