BEGIN TRANSACTION;
CREATE TABLE catalog_meta (
	name TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "catalog_meta" VALUES('schema','1 dfcce61b301907a52bcd73c0baaf6aac');
CREATE TABLE document_texts (
	collection TEXT NOT NULL, 
	id TEXT NOT NULL, 
	namespace TEXT NOT NULL, 
	"key" BLOB NOT NULL, 
	checksum INTEGER NOT NULL, 
	PRIMARY KEY (collection, id, namespace, "key")
)
 WITHOUT ROWID

;
INSERT INTO "document_texts" VALUES('index:1efb8f56cf484f9e95d941d216b3d3d6','','',X'31B622B6C11233F7586DD01677FA51CE',1168610162);
INSERT INTO "document_texts" VALUES('index:1efb8f56cf484f9e95d941d216b3d3d6','','',X'3D7757F8FA44673378BC87C7C5754538',545259373);
INSERT INTO "document_texts" VALUES('index:1efb8f56cf484f9e95d941d216b3d3d6','','',X'B273A9AAB1FDA93B11584752F644618F',1480836110);
INSERT INTO "document_texts" VALUES('index:1efb8f56cf484f9e95d941d216b3d3d6','','',X'FC78BE47B4BE9374C30BAE1C9B3A6FA8',3881132459);
INSERT INTO "document_texts" VALUES('langchain','9','',X'16A438014342A4D345F725D74837CDED',1927994213);
CREATE TABLE document_versions (
	collection TEXT NOT NULL, 
	id TEXT NOT NULL, 
	namespace TEXT NOT NULL, 
	version TEXT NOT NULL, 
	checksum INTEGER NOT NULL, 
	PRIMARY KEY (collection, id, namespace)
)
 WITHOUT ROWID

;
CREATE TABLE entry_chunks (
	ids_hash BLOB NOT NULL, 
	namespace TEXT NOT NULL, 
	entry TEXT NOT NULL, 
	checksum INTEGER NOT NULL, 
	PRIMARY KEY (ids_hash, namespace, entry)
)
 WITHOUT ROWID

;
CREATE TABLE sent_documents (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	namespace TEXT NOT NULL, 
	collection TEXT NOT NULL, 
	id TEXT NOT NULL, 
	ingestion TEXT NOT NULL, 
	version TEXT NOT NULL, 
	metadata TEXT NOT NULL, 
	stored_version TEXT DEFAULT '' NOT NULL, 
	reason TEXT DEFAULT '' NOT NULL, 
	body TEXT, 
	num_chunks INTEGER DEFAULT '0' NOT NULL, 
	num_tokens INTEGER DEFAULT '0' NOT NULL, 
	num_known_kv INTEGER DEFAULT '0' NOT NULL, 
	num_new_kv INTEGER DEFAULT '0' NOT NULL, 
	new_kv_bytes INTEGER DEFAULT '0' NOT NULL, 
	UNIQUE (namespace, collection, id)
);
CREATE TABLE stored_entries (
	entry TEXT NOT NULL, 
	fingerprint TEXT NOT NULL, 
	checksum INTEGER NOT NULL, 
	PRIMARY KEY (entry)
)
 WITHOUT ROWID

;
INSERT INTO "stored_entries" VALUES('entry-a','model',2022879107);
CREATE TABLE texts (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	"key" BLOB NOT NULL, 
	text TEXT NOT NULL, 
	UNIQUE ("key")
);
INSERT INTO "texts" VALUES(1,X'31B622B6C11233F7586DD01677FA51CE','Basalt is dark.');
INSERT INTO "texts" VALUES(2,X'3D7757F8FA44673378BC87C7C5754538','Basalt is a rock.');
INSERT INTO "texts" VALUES(3,X'FC78BE47B4BE9374C30BAE1C9B3A6FA8','Slate is grey.');
INSERT INTO "texts" VALUES(4,X'B273A9AAB1FDA93B11584752F644618F','Slate splits.');
INSERT INTO "texts" VALUES(5,X'16A438014342A4D345F725D74837CDED','Of a framework.');
CREATE TABLE token_ids (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tokenizer TEXT NOT NULL, 
	namespace TEXT NOT NULL, 
	"key" BLOB NOT NULL, 
	ids BLOB NOT NULL, 
	checksum INTEGER NOT NULL, 
	UNIQUE ("key", tokenizer, namespace)
);
CREATE TABLE variants (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	entry TEXT NOT NULL, 
	"key" BLOB NOT NULL, 
	embedder TEXT NOT NULL, 
	vector BLOB NOT NULL, 
	is_stored INTEGER NOT NULL, 
	checksum INTEGER NOT NULL, 
	UNIQUE (entry)
);
CREATE INDEX document_texts_by_key ON document_texts ("key");
CREATE INDEX entry_chunks_by_entry ON entry_chunks (entry);
CREATE INDEX variants_by_key ON variants ("key");
CREATE INDEX missing_variants ON variants (embedder) WHERE is_stored = 0;
CREATE INDEX sent_documents_waiting ON sent_documents (number) WHERE body IS NOT NULL;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('texts',5);
PRAGMA user_version = 1;
COMMIT;
