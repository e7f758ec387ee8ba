/*
 * Clean names: drop the blanks around them, refuse a line without a name.
 *
 * A reply is any number of lines and a NUL; a refusal is its reason and a NAK.
 */

import { createInterface } from "node:readline";

for await (const line of createInterface({ input: process.stdin })) {
  const name = line.trim();
  process.stdout.write(name ? `${name}\n\0` : "no name\x15");
}
