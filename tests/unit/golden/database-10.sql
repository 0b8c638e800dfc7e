BEGIN TRANSACTION;
CREATE TABLE clock (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), saved_now, digest);
INSERT INTO "clock" VALUES(1,1.0,X'37C97C9A1AE85AF724A82EB99300BF60');
CREATE TABLE closed_rounds (round INTEGER PRIMARY KEY, commit_message, plan, rest, digest);
CREATE TABLE commits (
    round INTEGER PRIMARY KEY, incarnation, base_digest, outer_digest, statement_digest, signature,
    digest
);
CREATE TABLE enrolled (
    invite_id, node_id, node_name, public_key, certificate_serial, digest,
    PRIMARY KEY (invite_id, node_id)
) WITHOUT ROWID;
INSERT INTO "enrolled" VALUES('inv','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','attic',X'6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B6B','',X'29BF3DFE4E4780C672CCBE52C168F0BD');
CREATE TABLE figures (round INTEGER PRIMARY KEY, summary, digest);
CREATE TABLE held_out (
    place INTEGER PRIMARY KEY, round, loss, tokens, metric, holders, digest
);
CREATE TABLE invites (
    place INTEGER PRIMARY KEY, invite_id, secret_hash, max_uses, expires_utc_seconds, is_revoked,
    host, label, needs_approval, role, digest
);
INSERT INTO "invites" VALUES(1,'inv',X'6868686868686868686868686868686868686868686868686868686868686868',2,60.0,0,'h','',0,'node',X'25AA1F8C227E2A889063681431D93B48');
CREATE TABLE ledger (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), ledger, digest);
CREATE TABLE members (node_id PRIMARY KEY, member, digest) WITHOUT ROWID;
CREATE TABLE open_round (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), round, digest);
CREATE TABLE round_parts (
    kind, slice_index, node_id, part, digest, PRIMARY KEY (kind, slice_index, node_id)
) WITHOUT ROWID;
CREATE TABLE rulings (number INTEGER PRIMARY KEY, ruling, signature, digest);
INSERT INTO "rulings" VALUES(1,'{"before":"0000000000000000000000000000000000000000000000000000000000000000","by":"the run owner","changes":[],"from_round":0,"invite_id":"","kind":"paused","node_id":"","node_name":"","number":1,"reason":"the move","unix_seconds":1.0}',X'',X'ED1F92AB19CE1720887FEA1EEA4B4EC1');
CREATE TABLE run_file (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), tables, digest);
CREATE TABLE swarm (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), state, digest);
INSERT INTO "swarm" VALUES(1,'[{"rules":{"total_rounds":100,"min_nodes":2,"inner_steps":5,"batch":2,"context":8,"train_seconds":60.0,"contribute_seconds":70.0,"commit_seconds":80.0,"apply_seconds":10.0,"lease_seconds":15.0,"evaluate_every_rounds":1,"adapts_deadlines":false,"floor_seconds":0.0,"has_overlap":false,"schedule_tokens":null,"round_steps":null,"slice_elements":4611686018427387904,"has_private_data":false,"first_digest":null,"watches_loss":false,"bounds_results":true},"run_digest":"9999999999999999999999999999999999999999999999999999999999999999","members":{},"layout":null,"corpus":null,"codecs":[],"committed_round":0,"outer_digest":null,"token_clock":0,"ledger":{"committed":[],"leased":[],"ahead":[],"frontiers":{},"skipped":[]},"phase_times":{"train":[],"exchange":[],"commit":[],"apply":[]},"next_session_id":1,"open_round":null,"norms":[],"recent":[],"held_out":[],"evaluating":null,"alarm":null,"end_waits_until":null,"is_finished":false,"finished_at":null,"incarnation":0,"unsupplied_since":null,"awaited":null,"left":[],"has_untold":false,"wire":{},"round_wire":{},"all_reduce_bytes":0,"rulings":[],"latest_rulings":{},"rolled_back":[],"paused":null,"stopped":null}]',X'CD73681885A3B8D9A976136FF27BB7C0');
COMMIT;
