"""Messages that fit a schema and messages that do not, for all ends with rows."""

from __future__ import annotations

DDL = (
    "id long, d decimal(5,2), t timestamp, dt date, f double, r float, bo boolean, "
    "i int, bt byte, title string, s struct<a: int, b: array<int>>, l array<int>, "
    "m map<string,long>, deep array<struct<x: double>>, "
    "bts map<string, array<struct<x: byte not null>>>, n timestamp_ntz, "
    "ts array<timestamp>, texts map<string, array<string>>, ds array<decimal(3,1)>, "
    "big decimal(38,18), bigs map<string, array<struct<x: decimal(38,18)>>>"
)
NOT_NULL = (
    "id long not null, s struct<a: int not null>, "
    "l array<struct<x: int not null>>, m map<string, struct<y: int not null>>"
)

FITS = [
    '{"id":1}',
    ' \n{"id" : 1 }\t\r\n ',
    '{"id":1,"title":"a } b"}',
    '{"id":1,"title":null}',
    '{"id":1,"extra":{"a":[1,{}]}}',
    '{"id":1,"id":2}',
    '{"id":1,"s":{"a":1,"b":[1]}}',
    '{"id":1,"s":{}}',
    '{"id":1,"l":[1,null]}',
    '{"id":1,"m":{"a":1,"b":null}}',
    '{"id":1,"d":1.23}',
    '{"id":1,"d":1.2300}',
    '{"id":1,"d":-999.9}',
    '{"id":1,"d":"1.23"}',
    '{"id":1,"big":1.123456789012345678,"bigs":{"a":[{"x":1e-18},null,{}],"b":null}}',
    '{"id":1,"big":"-1.50000000000000000000000e3","d":1e1}',
    '{"id":1,"big":0E-18,"d":"0.00000000000000000000000000000000000000000000000"}',
    '{"id":1,"t":"2020-01-01T00:00:00Z"}',
    '{"id":1,"t":"1880-01-01 00:00:00.123456+00:53:28","ts":["2020-01-01"]}',
    '{"id":1,"t":"2020-01-01T00:00:00+05","n":"2020-01-01 00:00:00.1"}',
    '{"id":1,"t":null,"n":"2020-01-01T00:00:00","ts":["2020-01-01T00:00:00Z",null]}',
    '{"id":1,"dt":"2020-02-29"}',
    '{"id":1,"f":1e300,"r":1}',
    '{"id":1,"texts":{"a":["}",null],"b":null}}',
    '{"id":1,"title":"\\u0000\\n\\u00e9"}',
    '{"title":"é€𝄞"}',
    '{"bt":-128,"bts":{"a":[{"x":127},{"x":-128}],"b":null}}',
]

UNFIT = {
    # No JSON object.
    "": "it is empty",
    "  ": "it is empty",
    "null": "it is null, not an object",
    "1": "it is a number, not an object",
    '"s"': "it is a string, not an object",
    "true": "it is a boolean, not an object",
    "[]": "it is an array, not an object",
    '[{"id":1}]': "it is an array, not an object",
    '[{"id":1},{"id":2}]': "it is an array, not an object",
    # Malformed.
    '{"id":1': "it is not one JSON document",
    "{'id':1}": "it is not one JSON document",
    '{"id":1,}': "it is not one JSON document",
    '{"id":01}': "it is not one JSON document",
    '{"id":1 /* c */}': "it is not one JSON document",
    '\ufeff{"id":1}': "it is not one JSON document",
    '{"id":1,"title":"a\nb"}': "it is not one JSON document",
    # Something after the object.
    '{"id":1}garbage': "it is not one JSON document (Extra data",
    '{"id":1} {"id":2}': "it is not one JSON document (Extra data",
    '{"id":1},{"id":2}': "it is not one JSON document (Extra data",
    '{"id":1}, "m":{"id":2}': "it is not one JSON document (Extra data",
    '{"id":1}}': "it is not one JSON document (Extra data",
    '{"id":1}]': "it is not one JSON document (Extra data",
    '{"id":1}] }': "it is not one JSON document (Extra data",
    '{"id":1}\0': "it is not one JSON document (Extra data",
    # The wrong type.
    '{"id":"x"}': "field 'id' is a string that is no bigint",
    '{"id":"12"}': "field 'id' is a string that is no bigint",
    '{"id":""}': "field 'id' is a string that is no bigint",
    '{"id":1.5}': "field 'id' is a number that is no bigint",
    '{"id":99999999999999999999}': "field 'id' is a number that is no bigint",
    '{"id":true}': "field 'id' is a boolean that is no bigint",
    '{"id":1,"i":3000000000}': "field 'i' is a number that is no int",
    '{"id":1,"bt":300}': "field 'bt' is a number that is no tinyint",
    '{"id":1,"bt":128}': "field 'bt' is a number that is no tinyint",
    '{"id":1,"bts":{"a":[{"x":255}]}}': "a value in it does not fit",
    '{"id":1,"bo":"true"}': "field 'bo' is a string that is no boolean",
    '{"id":1,"f":"x"}': "field 'f' is a string that is no double",
    '{"id":1,"f":"NaN"}': "field 'f' is a string that is no double",
    '{"id":1,"f":NaN}': "it is not one JSON document (NaN is no number)",
    '{"id":1,"f":1e400}': "a value in it does not fit",
    '{"id":1,"r":1e39}': "a value in it does not fit",
    '{"id":1,"deep":[{"x":1},{"x":-1e400}]}': "a value in it does not fit",
    '{"id":1,"d":123456.78}': "field 'd' is a number that is no decimal(5,2)",
    # What Spark would convert without a word.
    '{"id":1,"d":1.239}': "a value in it does not fit",
    '{"id":1,"d":"1.239"}': "a value in it does not fit",
    '{"id":1,"ds":[1.25]}': "a value in it does not fit",
    '{"id":1,"title":5}': "field 'title' is a number that is no string",
    '{"id":1,"title":true}': "field 'title' is a boolean that is no string",
    '{"id":1,"title":{"a":"}"}}': "field 'title' is an object that is no string",
    '{"id":1,"title":["a"]}': "field 'title' is an array that is no string",
    '{"id":1,"texts":{"a":["x",1]}}': "a value in it does not fit",
    '{"id":1,"t":5}': "field 't' is a number that is no timestamp",
    '{"id":1,"n":5}': "field 'n' is a number that is no timestamp_ntz",
    '{"id":1,"ts":["2020-01-01T00:00:00Z",5]}': "a value in it does not fit",
    '{"id":1,"d":"x"}': "field 'd' is a string that is no decimal(5,2)",
    '{"id":1,"t":"nope"}': "field 't' is a string that is no timestamp",
    '{"id":1,"t":"2020-02-31T00:00:00Z"}': "field 't' is a string that is no timestamp",
    '{"id":1,"t":"12:30:00"}': "field 't' is a string that is no timestamp",
    '{"id":1,"t":"2020-1-1"}': "field 't' is a string that is no timestamp",
    '{"id":1,"t":"2020"}': "field 't' is a string that is no timestamp",
    '{"id":1,"t":" 2020-01-01"}': "field 't' is a string that is no timestamp",
    '{"id":1,"t":"2020-01-01T00:00Z"}': "field 't' is a string that is no timestamp",
    '{"id":1,"t":"2020-01-01T00:00:00.1234567Z"}': "field 't' is a string that is no",
    '{"id":1,"t":"2020-01-01T00:00:00 Europe/Paris"}': "field 't' is a string that is",
    '{"id":1,"n":"2020-01-01T00:00:00+05:00"}': "field 'n' is a string that is no time",
    '{"id":1,"n":"2020-01-01T00:00:00Z"}': "field 'n' is a string that is no timestamp",
    '{"id":1,"dt":"20200102"}': "field 'dt' is a string that is no date",
    '{"id":1,"dt":"2020"}': "field 'dt' is a string that is no date",
    '{"id":1,"dt":"2020-1-2"}': "field 'dt' is a string that is no date",
    '{"id":1,"dt":"2020-01-02T25:99"}': "field 'dt' is a string that is no date",
    '{"id":1,"dt":"2020-01-02 or so"}': "field 'dt' is a string that is no date",
    '{"id":1,"big":1.1234567890123456789}': "a value in it does not fit",
    '{"id":1,"big":"1.1234567890123456789"}': "a value in it does not fit",
    '{"id":1,"big":1e-19}': "a value in it does not fit",
    '{"id":1,"bigs":{"a":[{"x":1},{"x":0.0012345678901234567}]}}': "a value in it does",
    '{"id":1,"d":0.000000000000000000000000000000000000001}': "a value in it does not",
    '{"id":1,"d":" 1.23"}': "",
    '{"id":1,"dt":"2020-13-01"}': "field 'dt' is a string that is no date",
    '{"id":1,"dt":7}': "field 'dt' is a number that is no date",
    '{"id":1,"s":3}': "field 's' is a number that is no struct<a:int,b:array<int>>",
    '{"id":1,"s":{"a":"x"}}': "a value in it does not fit",
    '{"id":1,"s":{"a":1,"b":["x"]}}': "a value in it does not fit",
    '{"id":1,"l":3}': "field 'l' is a number that is no array<int>",
    '{"id":1,"l":[1,"x"]}': "",
    '{"id":1,"m":[1]}': "field 'm' is an array that is no map<string,bigint>",
    '{"id":1,"m":{"a":"x"}}': "",
    # A row of nulls.
    "{}": "it has none of the schema's fields",
    '{"ID":1}': "it has none of the schema's fields",
    '{"id":null}': "it has none of the schema's fields",
}
