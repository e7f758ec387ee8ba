"""
Which animals do aircraft hit where? A notebook as a script, cell by cell.

Two tables are joined by Spark, a worker is asked about each row inside Spark's
executors, and its replies are aggregated by Spark again.
"""

# %% Spark, as you are used to it; Session also finds the Java of the extra "java"
import sys
from pathlib import Path

from pyspark.sql import Window
from pyspark.sql import functions as sf

from etlstage import Stage
from etlstage.spark import Session, transform

session = Session()
spark = session.start()

# %% Two tables, and a lookup: which region of the FAA is the state in?
strikes = spark.read.csv("../demo/birdstrikes.csv", header=True).select(
    sf.col("Origin State").alias("state"),
    sf.col("Wildlife Species").alias("species"),
    sf.col("Cost Total $").cast("long").alias("cost_usd"),
)
regions = spark.read.csv("regions.csv", header=True)
joined = strikes.join(sf.broadcast(regions), "state")

# %% A worker is given the species and answers with JSON; no answer, no row
classify = Stage(
    name="classify",
    worker=(sys.executable, str(Path("animal.py").resolve())),
)
classified = transform(
    joined,
    classify,
    message="species",
    schema="animal string, kind string",
    keep=["region", "cost_usd"],
)

# %% Ordinary DataFrame code: the three animals that are hit most in each region
most = Window.partitionBy("region").orderBy(sf.desc("strikes"), "animal")
top = (
    classified.where("kind = 'bird'")
    .groupBy("region", "animal")
    .agg(sf.count("*").alias("strikes"), sf.sum("cost_usd").alias("cost_usd"))
    .withColumn("place", sf.row_number().over(most))
    .where("place <= 3")
)
top.write.mode("overwrite").parquet("out/animals")

# %% What came of it
spark.read.parquet("out/animals").orderBy("region", "place").show(30)
session.stop()
